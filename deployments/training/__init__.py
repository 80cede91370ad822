"""Training as a library: what to train -> a trained version -> a published bundle. The commands and the examples call it.

    plan = TrainingPlan(ModelPlan(dim=32), TrainOptions(epochs=20), decoder=DecoderPlan("tiny"), ranker=RankerOptions())
    with TrainingProgress() as progress:
        version = train_version(plan, dataset, RunOptions(), progress)
    bundle = version.publish(Path("models/shop"))

pipelines/ has what is learnt and how; here it is joined with the models' own files.
"""
