import cProfile, pstats
def test_x(train, tmp_path):
    train(tmp_path / "0", tune="full", dataset_test_split="null", max_steps=1)
    p = cProfile.Profile(); p.enable()
    train(tmp_path / "a", tune="full", dataset_test_split="null", max_steps=2)
    p.disable(); pstats.Stats(p).sort_stats("cumtime").print_stats(45); assert 0
