"""What a test cluster finds in place of pandas, which genrec does without: Ray Serve imports it in each of its processes where it is
installed, as it is here for other tests, and that takes 0.3 s of processor time.
"""

raise ImportError("pandas is kept from the processes of test clusters; see tests/absent")
