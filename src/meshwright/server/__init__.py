"""One model behind an HTTP address, with the interface of OpenAI: requests in, answers out while they grow.

In the process that has the model:

    http_server      the address, signals, and the start and end of the other process
    hosted_model     the model, and its engine
    engine_thread    the engine's own thread: commands in, a message a step out
    adapter_folder   adapters that come and go

Between the two: `channel` (frames), `engine_messages` and `model_card` (what they hold).

In the HTTP process, which has no torch:

    front            the loop: start, draining, end
    gate             keys, hosts, headers: what every request passes
    routes, adapter_routes, application                   -> the ASGI application
    request_body     bytes of a connection                -> JSON
    request_fields, chat_fields                           what a body may ask for
    checked_fields   JSON                                 -> fields
    prompts          fields                               -> tasks for the engine
    prompt_reader    text and conversations               -> token ids, in processes of their own
    engine_link      tasks to the engine's process, and news from there
    engine_task      one prompt; its answers become text token by token
    answering        the answers to one HTTP request, as they grow
    tool_use         tools that are offered, and calls in answers
    completion_shape, chat_shape, answer_document         -> the JSON of answers
    event_stream, guarded_connection                      -> server-sent events on a connection

Nothing here reads the environment.
"""
