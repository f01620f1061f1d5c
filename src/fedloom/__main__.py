"""python -m fedloom"""

from .cli import main

main()
