"""The Python interface: a function for each verb, and the frozen object that it answers with.

    plan_reading     words, keywords and plans -> Plan
    plan_request     model, cluster and recipe -> the Plan whose layout is searched
    layout_argument  the fields of a layout that are fixed
    planning         plan          -> PlanAnswer of planned_layout.PlannedLayout
    serve_planning   plan_serving  -> ServingAnswer
    serving_comparison  compare_serving  -> ServingComparison
    dry_runs         dry_run       -> DryRunAnswer
    profiling        profile       -> ProfileAnswer
    training_run     train, tune   -> TrainAnswer; preflight: plan and dry run before the first step
    distilling       distill       -> TrainAnswer
    comparing        compare       -> ComparisonAnswer; report
    evaluation       evaluate      -> EvaluationAnswer
    quantizing       quantize      -> QuantizeAnswer
    model_opening    load          -> trained_model.TrainedModel: generate, generate_many, evaluate, serve
    serving          a model behind an HTTP address
    dialogue         a conversation with a model; offline_answers: answers to a file of prompts
    answer           base of all answers; documents: answers as JSON; markup: answers as HTML

`import meshwright` offers the functions by name, and imports each on first use. Printing belongs to `cli`.
"""
