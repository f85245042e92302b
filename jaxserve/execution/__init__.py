"""The compiled world: a step plan becomes one int32 blob, one program call, one int32 array."""
