"""Exit status 0 if the server answers that it is healthy: healthcheck.py [URL]"""

import sys
from urllib.error import URLError
from urllib.request import urlopen

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/health"
try:
    with urlopen(url, timeout=4) as answer:
        sys.exit(0 if answer.status == 200 else f"{url}: {answer.status}")
except (URLError, OSError) as error:
    sys.exit(f"{url}: {error}")
