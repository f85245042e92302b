"""x"""


def register(s):
    pass
