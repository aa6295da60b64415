# SPDX-License-Identifier: Apache-2.0
"""`python -m cohobate.cli`, for launchers that want a module: `torchrun -m cohobate.cli train …`."""

from cohobate.cli.app import main

main()
