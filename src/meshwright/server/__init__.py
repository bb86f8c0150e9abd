"""One model behind an HTTP address, with the interface of OpenAI: requests in, answers out while they grow.

    request_body     bytes of a connection                -> JSON
    request_fields, chat_fields                           what a body may ask for
    checked_fields   JSON                                 -> fields
    prompts          fields                               -> tasks for the engine
    prompt_reader    text and conversations               -> token ids, in processes of their own
    engine_thread    the engine's own thread: tasks in, progress out
    answering        the answers to one HTTP request, as they grow
    tool_use         tools that are offered, and calls in answers
    completion_shape, chat_shape                          -> the JSON of answers
    event_stream     answers                              -> server-sent events
    gate             keys, hosts, headers: what every request passes
    routes, application                                   -> the ASGI application
    http_server      sockets, signals, draining

Only `routes`, `event_stream`, `gate`, `application` and `http_server` know HTTP; nothing here reads the environment.
"""
