"""Running programs: sessions that hold values, and the devices that execute graphs."""
