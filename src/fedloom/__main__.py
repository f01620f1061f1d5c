"""python -m fedloom"""

from .cli.app import main

main()
