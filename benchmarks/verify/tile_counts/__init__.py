"""The native linear layers' use of a CPU's matrix unit, counted on an emulated one."""
