"""The pure part: what a step computes, on arrays, without a clock, a wire or a disk."""
