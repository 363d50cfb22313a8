"""What every launch shares: backend, tuning, arithmetic."""
