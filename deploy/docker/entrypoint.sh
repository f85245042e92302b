#!/bin/sh
# A command of jaxserve with its flags (serve MODEL ...), or any program by its path (/bin/bash).
set -eu
case "${1-}" in
  /* | sh | bash | python) exec "$@" ;;
  *) exec jaxserve "$@" ;;
esac
