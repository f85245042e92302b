"""What a policy does to first tokens: the same arrivals, first come first served and by length."""
