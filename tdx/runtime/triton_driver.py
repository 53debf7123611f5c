"""tmp"""
def constexpr(v):
    import triton.language as tl
    return tl.constexpr(v)
