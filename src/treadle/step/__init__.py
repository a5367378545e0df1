"""What compiling gives: training steps and forwards over values that a session holds."""
