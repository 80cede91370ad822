#!/bin/sh
# Starts HAProxy for Ray Serve, by RAY_SERVE_HAPROXY_BINARY_PATH. Ray has a new manager of HAProxy start one that knows no gateway,
# and tells it of them half a second later; until then it would answer 404. Here it begins with what the one that died knew.
# Its statistics and metrics are for this machine alone: Ray has them listen on every address, and has no setting for that.
# `-sf` names a process to take over from: that configuration is whole, and kept. GENREC_HAPROXY: the program.
config= before= takes_over=
for argument; do
    [ "$before" = -f ] && config=$argument
    [ "$argument" = -sf ] && takes_over=yes
    before=$argument
done
if [ -n "$config" ]; then
    sed -i -e '/^listen stats/,$ s/bind \*:/bind 127.0.0.1:/' -e '/^frontend prometheus/,/^frontend http/ s/bind :/bind 127.0.0.1:/' "$config"
fi
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
