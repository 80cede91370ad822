"""How much memory serving takes: part by part, process by process, on the host and on the GPU; and whether that is there.

model.py      what is known of a model: of a bundle's, or of one that is only thought of
parts.py      what a part is: where it lies, whether it is taken at once or fills up
engines.py    the parts of the engines of each stage
processes.py  the parts of each process of a configuration
fit.py        what is refused before it is started

plan = plan_of(settings, sizes_of(bundle), replicas(document, most=False), Use(users=10_000), "host")
"""
