"""From a recipe to the things it names: devices with data, a method, an engine, and what may go wrong."""
