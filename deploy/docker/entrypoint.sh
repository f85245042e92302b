#!/bin/sh
# A command of jaxserve with its flags (serve MODEL ...), or any program by its path (/bin/bash).
# A Hugging Face cache that is mounted into root's home, as for vLLM's image, is the one that is used.
set -eu
mounted=/root/.cache/huggingface
if [ -z "${HF_HOME-}" ] && [ -r "$mounted" ] && [ -x "$mounted" ]; then
  export HF_HOME="$mounted"
fi
case "${1-}" in
  /* | sh | bash | python) exec "$@" ;;
  *) exec jaxserve "$@" ;;
esac
