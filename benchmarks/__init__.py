"""Programs that measure; each is run as a module from the top folder."""
