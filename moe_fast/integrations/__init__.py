"""moe_fast within other packages: a module for each, which needs that package."""
