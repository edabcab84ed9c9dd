"""`python -m paramstore`."""

from paramstore.cli.main import main

main()
