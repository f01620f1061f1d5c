"""Other systems on equal work, each in a process and, if need be, with an interpreter of its own."""
