"""What a researcher does with runs: open them, measure them, take them away."""
