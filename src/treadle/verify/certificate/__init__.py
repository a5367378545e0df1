"""What a compile did, as plain records that a program without Treadle can check."""
