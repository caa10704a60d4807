"""How the equation is computed. Each engine says why it cannot serve a call, or serves it."""
