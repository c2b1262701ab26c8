"""Exit status 0 if the server answers that it is healthy: healthcheck.py [URL]"""

import sys
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/health"
try:
    with build_opener(ProxyHandler({})).open(url, timeout=4) as answer:  # a container may have a proxy set
        sys.exit(0 if answer.status == 200 else f"{url}: {answer.status}")
except (URLError, OSError) as error:
    sys.exit(f"{url}: {error}")
