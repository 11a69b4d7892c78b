from blocktrain.core.spelling import meant


def test_a_mistyped_word_is_understood_and_another_is_not():
    known = ("width", "window", "layers")
    assert meant("wdth", known) == "width"
    assert meant("colour", known) is None
