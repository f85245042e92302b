"""First tokens by policy: the same arrivals, first come first served and by length."""
