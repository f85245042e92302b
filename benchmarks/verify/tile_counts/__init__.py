"""What the native linear layers ask of a CPU's matrix unit, counted on an emulated one."""
