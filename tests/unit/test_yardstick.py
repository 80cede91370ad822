from benchmarks.yardstick import Loop, describe, run_loop


def test_the_loop_tells_its_processor_time_and_its_wall_time():
    loop = run_loop(turns=1000)
    assert loop.processor_s > 0
    assert loop.wall_s > 0


def test_the_line_tells_the_speed_of_a_core_and_the_share_that_others_took():
    assert describe([Loop(0.5, 0.5), Loop(0.7, 1.5)]) == (
        "yardstick: 2 cores, 0.60 s of processor time each for 10 million turns, 40% of the time taken by others"
    )
