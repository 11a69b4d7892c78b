"""How fast devices train: sustained bf16 FLOP/s at these widths, not the datasheet's peak."""

FLOPS = {
    "laptop-cpu": 1.0e11,
    "server-cpu": 1.0e12,
    "rtx-3060": 1.2e13,
    "rtx-4090": 6.0e13,
    "a100": 1.2e14,
    "h100": 2.5e14,
    "h200": 2.5e14,
}
