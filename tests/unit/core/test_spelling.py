from blocktrain.config import closest_match


def test_a_mistyped_word_is_understood_and_another_is_not():
    known = ("width", "window", "layers")
    assert closest_match("wdth", known) == "width"
    assert closest_match("colour", known) is None
