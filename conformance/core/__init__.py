"""What a family of functions is written with: cases, axes, contracts and laws."""
