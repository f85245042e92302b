"""Exit code 0 if the server of this container says that it serves; JAXSERVE_PORT is not 8000."""

import os
import sys
import urllib.error
import urllib.request

URL = f"http://127.0.0.1:{os.environ.get('JAXSERVE_PORT', '8000')}/health"

try:
    with urllib.request.urlopen(URL, timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (urllib.error.URLError, TimeoutError) as error:
    print(f"{URL}: {error}")
    sys.exit(1)
