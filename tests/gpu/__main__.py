"""python -m tests.gpu, see program.py. (Other processes can import that module, but not this one.)"""

import sys

from tests.gpu.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
