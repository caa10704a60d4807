"""The engines compute the equation. Each one runs a call or says why it does not support it."""
