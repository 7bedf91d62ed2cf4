def activate() -> None:
    pass
