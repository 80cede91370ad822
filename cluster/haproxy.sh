#!/bin/sh
# Starts HAProxy for Ray Serve, by RAY_SERVE_HAPROXY_BINARY_PATH, with limits that Serve's configuration lacks. GENREC_HAPROXY: the program.
# What is refused here costs microseconds, and no gateway spends time on it. The numbers are the node's, from the environment of `ray start`:
: "${GENREC_HAPROXY_CONNECTIONS:=4000}" # of all clients; more wait unread. Below RAY_SERVE_HAPROXY_MAXCONN (4096), for statistics and gateways
: "${GENREC_HAPROXY_PER_ADDRESS:=1000}" # connections of one address (IPv6: one /64) but 127.0.0.1; more are closed
: "${GENREC_HAPROXY_PER_CALLER:=20000}" # requests in 10 s by one known key or, of all others, one address but 127.0.0.1; more are answered 429
: "${GENREC_HAPROXY_PER_GATEWAY:=1024}" # requests of this node under way in one gateway; more wait for a second, then 503
: "${GENREC_HAPROXY_HEADERS_S:=10}"     # for the headers of a request; then 408
: "${GENREC_HAPROXY_BODY_S:=10}"        # for a body, or the first RAY_SERVE_HAPROXY_TUNE_BUFSIZE bytes of it; then 408
: "${GENREC_HAPROXY_CERTIFICATE:=}"    # a PEM file: a certificate, those that vouch for it, and its key. With it, HTTPS is served on
: "${GENREC_HAPROXY_TLS_PORT:=8443}"    # this port of `http_options.host`, beside the plain HTTP
#
# Ray has a new manager of HAProxy start one that knows no gateway, and tells it of them half a second later; until then it would answer
# 404. Here it begins with what the one that died knew. `-sf` names a process to take over from: that configuration is whole, and kept.
config= before= takes_over=
for argument; do
    [ "$before" = -f ] && config=$argument
    [ "$argument" = -sf ] && takes_over=yes
    before=$argument
done

problem() { # FILE STATUS TITLE DETAIL RETRY-AFTER: an answer of HAProxy's own, as a gateway's problems are
    body="{\"title\":\"$3\",\"status\":${2%% *},\"detail\":\"$4\",\"instance\":\"\",\"errors\":[]}"
    printf 'HTTP/1.1 %s\r\nContent-Type: application/problem+json\r\nRetry-After: %s\r\nContent-Length: %s\r\n\r\n%s' "$2" "$5" ${#body} "$body" > "$1"
}

serve_https() { # HOST: the line that has HTTPS served. With a certificate that it cannot load, as one that a renewal has half written, HAProxy
    # would not start, and the one that runs would learn of no gateway any more. So it is given a copy, which follows the file while the file
    # can be loaded; where none ever could, HTTPS is left out.
    copy=$config.pem
    rm -f "$copy.new"
    if [ -z "$GENREC_HAPROXY_CERTIFICATE" ]; then
        rm -f "$copy"
        return
    fi
    if refusal=$( # of this user alone: the key is in it
        umask 077
        cat "$GENREC_HAPROXY_CERTIFICATE" 2>&1 > "$copy.new" &&
            printf 'listen check\n    bind 127.0.0.1:1 ssl crt %s\n' "$copy.new" | "$GENREC_HAPROXY" -c -f /dev/stdin 2>&1
    ); then
        mv "$copy.new" "$copy"
    elif [ -f "$copy" ]; then
        rm -f "$copy.new"
        echo "HTTPS goes on with the certificate before, as $GENREC_HAPROXY_CERTIFICATE cannot be loaded: $refusal" >&2
    else
        rm -f "$copy.new"
        echo "HTTPS is not served, as $GENREC_HAPROXY_CERTIFICATE cannot be loaded: $refusal" >&2
        return
    fi
    echo "bind $1:$GENREC_HAPROXY_TLS_PORT ssl crt $copy ssl-min-ver TLSv1.2 alpn http/1.1"
}

limit() { # Rules of the frontend, limits of its gateways, and the tables that count callers. The log is that of `option httplog`, without a
    # user, without a query, and without a path that cannot be unquoted. `idempotency-key`: HAProxy itself may send a request to a second
    # gateway, and its events are stored once.
    # `x-request-...`: a gateway watches its clients and ends what takes too long itself; told so, Serve awaits it directly.
    # `txn.genrec_path`: the path as gateways read it, unquoted; but `/-/healthz` is answered here as it is written alone.
    # `disable-h2-upgrade`: the limits are of connections with one request at a time; one of HTTP/2 has a hundred.
    # `/-/routes`: by it Serve names all applications, and their prefixes, to any caller.
    problem "$config.408.http" '408 Request Timeout' 'Too slow' 'headers or body did not arrive in time; send them at once' 2
    problem "$config.503.http" '503 Service Unavailable' 'Not available now' 'no gateway takes the request now; send it again later' 2
    # In place of HAProxy's own 502 and 504, which Serve's configuration makes a 500. `profile.py` says when a second gateway was asked before.
    problem "$config.lost.http" '503 Service Unavailable' 'Not available now' 'the gateway broke off or was silent; send it again, events with an Idempotency-Key' 0
    host=$(sed -n '/^frontend http_frontend/,/^ *bind /s/^ *bind \(.*\):[0-9]*$/\1/p' "$config")
    https=$(serve_https "$host")
    # Where half of the connections are taken, an address may have a share of those that are free: as many to each of its own as are there when
    # PER_ADDRESS of one address are the only ones. Of one that has more, each is closed after its next answer. However many connections a few
    # addresses open, and keep, some are left for the next one.
    half=$((GENREC_HAPROXY_CONNECTIONS / 2))
    share="sc1_conn_cur,mul($((GENREC_HAPROXY_CONNECTIONS - GENREC_HAPROXY_PER_ADDRESS))),add(sess.genrec_taken)"
    share="$share gt $((GENREC_HAPROXY_CONNECTIONS * GENREC_HAPROXY_PER_ADDRESS))"
    cat > "$config.rules" <<RULES
    $https
    option disable-h2-upgrade
    maxconn $GENREC_HAPROXY_CONNECTIONS
    log-format "%ci:%cp [%tr] %ft %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %CC %CS %tsc %ac/%fc/%bc/%sc/%rc %sq/%bq %hr %hs %{+Q,+E}[var(txn.genrec_logged)]"
    timeout http-request ${GENREC_HAPROXY_HEADERS_S}s
    tcp-request connection track-sc1 src,ipmask(32,64) table genrec_addresses unless { src 127.0.0.1 }
    tcp-request connection reject if { sc1_conn_cur gt $GENREC_HAPROXY_PER_ADDRESS }
    tcp-request connection set-var(sess.genrec_taken) fe_conn,mul($GENREC_HAPROXY_PER_ADDRESS)
    tcp-request connection reject if { fe_conn gt $half } { $share }
    http-request set-var(sess.genrec_taken) fe_conn,mul($GENREC_HAPROXY_PER_ADDRESS)
    http-after-response set-header connection close if { fe_conn gt $half } { $share }
    http-request set-var(txn.genrec_path) path,url_dec
    http-request set-var-fmt(txn.genrec_logged) "%HM %[path] %HV"
    http-request set-var-fmt(txn.genrec_logged) "%HM /v1/users/... %HV" if { var(txn.genrec_path) -m sub /v1/users/ }
    http-request set-var-fmt(txn.genrec_logged) "%HM ... %HV" unless { var(txn.genrec_path) -m found }
    acl genrec_has_key req.fhdr(authorization) -m found
    http-request set-var(txn.genrec_key) "req.fhdr(authorization),regsub('^[^ ]+ +',''),sha1,hex" if genrec_has_key
    acl genrec_known var(txn.genrec_key),table_gpt(2,genrec_callers) gt 0
    http-request set-var(txn.genrec_known) bool(true) if genrec_has_key genrec_known
    http-request set-var(txn.genrec_caller) var(txn.genrec_key) if { var(txn.genrec_known) -m found }
    http-request set-var(txn.genrec_caller) src,ipmask(32,64) unless { var(txn.genrec_known) -m found } or { src 127.0.0.1 }
    http-request track-sc0 var(txn.genrec_caller) table genrec_callers if { var(txn.genrec_caller) -m found } !{ path /-/healthz }
    acl genrec_flood sc0_http_req_rate gt $GENREC_HAPROXY_PER_CALLER
    http-request track-sc2 src,ipmask(32,64) table genrec_newcomers if genrec_flood genrec_has_key !{ var(txn.genrec_known) -m found }
    http-request return status 429 content-type application/problem+json hdr Retry-After 10 lf-string '{"title":"Too many requests","status":429,"detail":"more than $GENREC_HAPROXY_PER_CALLER requests in 10 s by this key or address; ask again in 10 s","instance":"%[path,json(utf8s)]","errors":[]}' if genrec_flood !{ sc2_tracked } or genrec_flood { sc2_http_req_rate gt 50 }
    http-request return status 404 content-type text/plain string "Not found" if { var(txn.genrec_path) -m str -i /-/routes } !{ src 127.0.0.1 }
    http-request wait-for-body time ${GENREC_HAPROXY_BODY_S}s if { req.hdr(content-length) -m found } or { req.hdr(transfer-encoding) -m found }
    http-request set-header idempotency-key %[uuid()] if METH_POST { var(txn.genrec_path) -m end /v1/events } !{ req.hdr(idempotency-key) -m found }
    http-request set-header x-request-disconnect-disabled ?1
    http-request set-header x-request-timeout-seconds 0
RULES
    # The headers by which gateways and HAProxy tell each other are listed in deployments/http/for_haproxy.py, with what each is for.
    # A gateway's answers say how many requests it would take just now, how many bytes of a body, and how many of these requests are one
    # caller's part. Larger bodies, and more requests than that times the gateways, are refused here, which costs the gateway no time: a flood
    # would keep it from its answers, and from its health checks. Each application has variables of its own.
    # What is refused so is not logged, which takes a fifth of the time. A check waits for 3 s: what answers more slowly is stopped, or stuck.
    # Until an answer has said it, the variables are not set, and nothing is full. What was said of bodies holds for 10 s: then one goes to
    # a gateway, whose settings may be others by now. Answers tell of a key, too, until one says that it is not known: that it is, that it may
    # be urgent, and that it operates. Until then its requests are counted as its address's: invented keys take up no room in the table, and
    # each of them costs a gateway a 401. Of an address that asks too often, 50 in 10 s with such keys are let through: an operator's may be one.
    # Where a gateway is full, these are let through:
    # - an operator's calls, which may be what ends an overload;
    # - 50 in 10 s of each address that call where operators do, with another key, or that ask how a gateway is;
    # - 50 in 10 s of each address that have a key of which nothing is known yet: these tables begin anew with each HAProxy, and forget;
    # - until twice as many are there, an urgent request; and until eight times as many are, as where a gateway has just lowered what it takes,
    #   one of a known key that has no more than its part: the gateway takes them in place of less urgent ones, and of those of a tenant or
    #   key that has many waiting.
    # The next request that is let through tells its gateway how many were refused and are not told yet. That number is subtracted:
    # two threads that tell the same one bring the count below 0, and it evens out. A thread that counts in the same instant may undo it.
    # Batches and erasures answer once all is done, for which they may take the whole time that a gateway gives a request. It tells that, too.
    # A gateway that gives no pages now, as too many are asked for, is asked for none until the second is over. Such a page is told to no
    # gateway as refused: it is no sign of an overload, and pages are asked for without a key.
    cat > "$config.full" <<'RULES'
    timeout check 3s
    http-response set-var(proc.genrec_most_BACKEND) res.hdr(genrec-most,1),add(0)
    http-response set-var(proc.genrec_bytes_BACKEND) res.hdr(genrec-most,2),add(0)
    http-response set-var(proc.genrec_part_BACKEND) res.hdr(genrec-most,3),add(0)
    http-response set-var(proc.genrec_longest_BACKEND) res.hdr(genrec-most,4),add(0)
    http-response set-var(proc.genrec_told_BACKEND) date if { res.hdr(genrec-most) -m found }
    http-response del-header genrec-most
    http-response set-var(proc.genrec_pages_BACKEND) date(1) if { res.hdr(genrec-pages) -m found }
    http-response del-header genrec-pages
    http-response track-sc3 var(txn.genrec_key) table genrec_callers if { res.hdr(genrec-known) -m found } { var(txn.genrec_key) -m found } !{ var(txn.genrec_known) -m found }
    http-response sc-set-gpt(0,3) 1 if { res.hdr(genrec-urgent) -m found }
    http-response sc-set-gpt(1,3) 1 if { res.hdr(genrec-operates) -m found }
    http-response sc-set-gpt(2,3) 1 if { res.hdr(genrec-known) -m found }
    http-response sc-set-gpt(0,0) 1 if { res.hdr(genrec-urgent) -m found } { var(txn.genrec_known) -m found }
    http-response sc-set-gpt(1,0) 1 if { res.hdr(genrec-operates) -m found } { var(txn.genrec_known) -m found }
    http-response sc-set-gpt(0,0) 0 if { status 401 }
    http-response sc-set-gpt(1,0) 0 if { status 401 }
    http-response sc-set-gpt(2,0) 0 if { status 401 }
    http-response del-header genrec-urgent
    http-response del-header genrec-operates
    http-response del-header genrec-known
    http-request return status 413 content-type application/problem+json lf-string '{"title":"Body too large","status":413,"detail":"body: has more than the %[var(proc.genrec_bytes_BACKEND)] bytes this service takes; send it in several parts","instance":"%[path,json(utf8s)]","errors":[{"field":"body","problem":"has more than the %[var(proc.genrec_bytes_BACKEND)] bytes this service takes; send it in several parts"}]}' if { req.hdr(content-length),sub(proc.genrec_bytes_BACKEND) gt 0 } { date,sub(proc.genrec_told_BACKEND) lt 10 }
    http-request set-var(txn.genrec_gateways) nbsrv
    http-request set-var(txn.genrec_most) var(proc.genrec_most_BACKEND),mul(txn.genrec_gateways)
    http-request set-var(txn.genrec_part) var(proc.genrec_part_BACKEND),mul(txn.genrec_gateways)
    acl genrec_full be_conn,sub(txn.genrec_most) gt 0
    acl genrec_operation var(txn.genrec_path) -m str PREFIX/v1/backends PREFIX/v1/cache PREFIX/v1/cache:invalidate PREFIX/v1/gateway PREFIX/v1/models
    acl genrec_operation var(txn.genrec_path) -m beg PREFIX/v1/backends/
    acl genrec_probe var(txn.genrec_path) -m str PREFIX/healthz PREFIX/readyz
    acl genrec_urgent req.hdr(priority) -m reg u=[0-2]
    acl genrec_few sc0_conn_cur,sub(txn.genrec_part) le 0
    acl genrec_let_through var(txn.genrec_let_through) -m bool
    http-request set-var(txn.genrec_most) var(txn.genrec_most),mul(8) if genrec_full genrec_few { sc_get_gpt(2,0) gt 0 }
    http-request set-var(txn.genrec_most) var(txn.genrec_most),mul(2) if genrec_full genrec_urgent { sc_get_gpt(0,0) gt 0 }
    http-request set-var(txn.genrec_let_through) bool(true) if genrec_full genrec_operation { sc_get_gpt(1,0) gt 0 }
    http-request track-sc2 src,ipmask(32,64) table genrec_spared if genrec_full genrec_operation !genrec_let_through or genrec_full genrec_probe METH_GET
    http-request track-sc2 src,ipmask(32,64) table genrec_newcomers if genrec_full { var(txn.genrec_key) -m found } !{ var(txn.genrec_known) -m found }
    http-request set-var(txn.genrec_let_through) bool(true) if { sc2_tracked } { sc2_http_req_rate le 50 }
    http-request set-var(txn.genrec_refused) bool(true) if genrec_full !genrec_let_through
    http-request set-var(proc.genrec_refused_BACKEND) var(proc.genrec_refused_BACKEND,0),add(1) if { var(txn.genrec_refused) -m found }
    acl genrec_page var(txn.genrec_path) -m str PREFIX/ PREFIX/docs PREFIX/openapi.json
    acl genrec_page var(txn.genrec_path) -m beg PREFIX/docs/ PREFIX/playground/
    http-request set-var(txn.genrec_refused) bool(true) if genrec_page { date,sub(proc.genrec_pages_BACKEND) lt 0 }
    http-request set-log-level silent if { var(txn.genrec_refused) -m found }
    http-request deny deny_status 503 if { var(txn.genrec_refused) -m found }
    http-request del-header genrec-refused
    http-request set-var(txn.genrec_untold) var(proc.genrec_refused_BACKEND) if { var(proc.genrec_refused_BACKEND) -m int gt 0 }
    http-request set-var(proc.genrec_refused_BACKEND) var(proc.genrec_refused_BACKEND),sub(txn.genrec_untold) if { var(txn.genrec_untold) -m found }
    http-request set-header genrec-refused %[var(txn.genrec_untold)] if { var(txn.genrec_untold) -m found }
    acl genrec_long var(txn.genrec_path) -m str PREFIX/v1/recommend:batch
    acl genrec_long method DELETE
    http-request set-timeout server 40s if genrec_long
    http-request set-timeout server var(proc.genrec_longest_BACKEND) if genrec_long
RULES
    # A gateway refuses many requests before their bodies are there. To pass that answer on, HAProxy would keep the exchange, among those that
    # are counted above, until its client has sent the body, which it may never do. So it gives the answer itself, and closes the connection.
    { # By variables: the headers of the gateway's answer are gone when this one is made.
        unread='if { res.hdr(genrec-unread) -m found }'
        echo "    http-response set-var(txn.genrec_problem) res.hdr(genrec-unread),b64dec $unread"
        echo "    http-response set-var(txn.genrec_retry) res.hdr(retry-after) $unread"
        echo "    http-response set-var(txn.genrec_asks) res.fhdr(www-authenticate) $unread"
        rate=
        for figure in Limit Remaining Reset; do
            echo "    http-response set-var(txn.genrec_rate_$figure) res.hdr(RateLimit-$figure) $unread"
            rate="${rate}hdr RateLimit-$figure %[var(txn.genrec_rate_$figure)] "
        done
        for status in 401 403 408 413 429 503; do
            case $status in
                401) more='hdr WWW-Authenticate %[var(txn.genrec_asks)] ' ;;
                429) more="hdr Retry-After %[var(txn.genrec_retry)] $rate" ;;
                503) more='hdr Retry-After %[var(txn.genrec_retry)] ' ;;
                *) more= ;;
            esac
            made="status $status content-type application/problem+json ${more}lf-string %[var(txn.genrec_problem)]"
            echo "    http-response return $made if { status $status } { var(txn.genrec_problem) -m found }"
        done
    } >> "$config.full"
    # `tune.pool`: with a fifth of its descriptors in use, HAProxy would open a connection for each request, and close it.
    sed -i -e '/^global/a\    tune.pool-low-fd-ratio 90\n    tune.pool-high-fd-ratio 95\n    tune.stick-counters 4' \
        -e "/^frontend http_frontend/,/^ *bind /{/^ *bind /r $config.rules
}" -e "s|^\( *\)errorfile 503 .*|\1errorfile 503 $config.503.http\n\1errorfile 408 $config.408.http|" \
        -e "s|^\( *errorfile 50[24]\) .*|\1 $config.lost.http|" \
        -e "/^ *server .* check/{/ backup/!s/\$/ maxconn $GENREC_HAPROXY_PER_GATEWAY/}" "$config"
    sed -n '/^backend default_backend/!s/^backend //p' "$config" | while read -r backend; do
        prefix=$(sed -n "s|^ *acl is_$backend path_beg \(.*\)/\$|\1|p" "$config" | sed 's/[&|\\]/\\&/g') # of its application's routes
        sed -e "s/BACKEND/$(printf %s "$backend" | tr -c A-Za-z0-9 _)/g" -e "s|PREFIX|$prefix|g" "$config.full" > "$config.backend"
        sed -i "/^backend $backend\$/r $config.backend" "$config"
    done
    cat >> "$config" <<'TABLES'
backend genrec_callers
    stick-table type string len 40 size 100k expire 60s store http_req_rate(10s),conn_cur,gpt(3)
backend genrec_spared
    stick-table type ipv6 size 100k expire 60s store http_req_rate(10s)
backend genrec_newcomers
    stick-table type ipv6 size 100k expire 60s store http_req_rate(10s)
backend genrec_addresses
    stick-table type ipv6 size 100k expire 60s store conn_cur
TABLES
}

if [ -n "$config" ]; then # statistics and metrics are for this machine alone: Ray has them listen on every address, without a setting for it
    sed -i -e '/^listen stats/,$ s/bind \*:/bind 127.0.0.1:/' -e '/^frontend prometheus/,/^frontend http/ s/bind :/bind 127.0.0.1:/' "$config"
fi
if [ -n "$takes_over" ]; then
    cp "$config" "$config.known"
elif [ -n "$config" ] && [ -f "$config.known" ]; then
    cp "$config.known" "$config"
fi
if [ -n "$config" ] && grep -q '^frontend http_frontend' "$config" && ! grep -q genrec_callers "$config"; then
    limit
fi
# Woken by a connection, it waits for its turn of a core that a gateway has, and then serves all that have come: half the switches between them.
if chrt --batch 0 true 2> /dev/null; then
    exec chrt --batch 0 "$GENREC_HAPROXY" "$@"
fi
exec "$GENREC_HAPROXY" "$@"
