"""Low precision: formats, recipes, quantisers."""
