"""What the command line and a notebook both call: a function for each verb, and the frozen object that it answers with.

    plan_reading     words, keywords and plans -> Plan
    plan_request     model, cluster and recipe -> the Plan whose layout is searched
    layout_argument  what of it is fixed
    planning         plan          -> PlanAnswer, of planned_layout.PlannedLayout
    serve_planning   plan_serving  -> ServingAnswer
    serving_comparison  compare_serving  -> ServingComparison
    dry_runs         dry_run       -> DryRunAnswer
    profiling        profile       -> ProfileAnswer
    training_run     train         -> TrainAnswer; preflight: what is said before the first step
    tuning           tune          -> TrainAnswer
    distilling       distill       -> TrainAnswer
    comparing        compare       -> ComparisonAnswer; report
    evaluation       evaluate      -> EvaluationAnswer
    quantizing       quantize      -> QuantizeAnswer
    model_opening    load          -> trained_model.TrainedModel: generate, generate_many, evaluate, serve
    serving          a model behind an HTTP address
    dialogue         turns with a model, as they are answered; offline_answers: a file of prompts
    answer           what they have in common; documents: as JSON, markup: as HTML

`import meshwright` offers the functions by name, and loads each when it is first used. Printing belongs to `cli`.
"""
