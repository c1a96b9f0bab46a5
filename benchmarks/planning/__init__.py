"""Plans and simulations of training steps; most of them are never run."""
