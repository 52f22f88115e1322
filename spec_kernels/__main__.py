import sys

from spec_kernels.cli import main

sys.exit(main())
