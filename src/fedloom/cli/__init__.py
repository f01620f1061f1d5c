"""The command line: `app` holds the verbs, every other file is one of them or shared by several."""
