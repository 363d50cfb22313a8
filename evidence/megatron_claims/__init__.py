"""What megatron-core 0.16.1 does where its router surprises, as tests of that package."""
