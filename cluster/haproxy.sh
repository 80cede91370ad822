#!/bin/sh
# Starts HAProxy for Ray Serve, whose RAY_SERVE_HAPROXY_BINARY_PATH this is. Ray has a new manager of HAProxy start one that knows no gateway,
# and tells it of them half a second later; until then it would answer 404. Here it begins with what the one that died knew.
# `-sf` names a process to take over from: that configuration is whole, and kept. GENREC_HAPROXY: the program.
config= before= takes_over=
for argument; do
    [ "$before" = -f ] && config=$argument
    [ "$argument" = -sf ] && takes_over=yes
    before=$argument
done
if [ -n "$takes_over" ]; then
    cp "$config" "$config.known"
elif [ -n "$config" ] && [ -f "$config.known" ]; then
    cp "$config.known" "$config"
fi
# Clients send their headers in time. A gateway watches its clients and ends what takes too long itself; told so, Serve awaits it directly.
if [ -n "$config" ] && ! grep -q x-request-disconnect-disabled "$config"; then
    sed -i '/^frontend http_frontend/,/^ *bind /{/^ *bind /a\
    timeout http-request 10s\
    http-request set-header x-request-disconnect-disabled ?1\
    http-request set-header x-request-timeout-seconds 0
}' "$config"
fi
exec "$GENREC_HAPROXY" "$@"
