#!/usr/bin/env bash
# Several Ray nodes on one machine, to try kimi_ray on a "cluster" and to test it. Linux.
#
#   cluster/local.sh up N [--base-port P] [--num-cpus C] [--object-store-mb M]
#   cluster/local.sh add          one more node, beside those of `up`
#   cluster/local.sh env          the exports that a driver needs:  eval "$(cluster/local.sh env)"
#   cluster/local.sh status       nodes and processes
#   cluster/local.sh kill I       end node I at once, as a power cut would (0 is the head)
#   cluster/local.sh down         end exactly what `up` started
#
# The state (recorded pids, token, Ray's temporary files) is in $KIMI_RAY_CLUSTER_DIR, by default
# ${TMPDIR:-/tmp}/kimi-ray-cluster-$USER. Two clusters at once need two state directories and two base ports.
# `ray stop` is never used: it ends every Ray of this user. Ray is taken from $PYTHON, else from the repository's
# .venv, else from python3.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
state=${KIMI_RAY_CLUSTER_DIR:-${TMPDIR:-/tmp}/kimi-ray-cluster-$(id -un)}
pids=$state/pids          # one process a line: pid, start time in clock ticks, node, name

die() { echo "local.sh: $*" >&2; exit 2; }

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=$here/../.venv/bin/python
    [[ -x $python ]] || python=$(command -v python3) || die "no Python found; set PYTHON"
fi

# When a process was started. With its pid it is an identity: a pid alone may be given to another process later.
started() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    stat=${stat##*) }
    set -- $stat
    [[ $1 != Z ]] || return 1
    echo "${20}"
}

lives() { [[ $(started "$1" || true) == "$2" ]]; }

# Add to the record what carries this cluster's mark in its environment, and what descends from recorded processes
# (workers overwrite their environment with their title).
record() {
    local id=$1 process node pid parent line
    local -A node_of=()
    while read -r pid _ node _; do
        if [[ -n $pid ]]; then node_of[$pid]=$node; fi
    done < <(cat "$pids" 2>/dev/null)
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        [[ -z ${node_of[$pid]:-} ]] || continue
        node=$( (tr '\0' '\n' < "$process/environ") 2>/dev/null | sed -n "s/^KIMI_RAY_CLUSTER=$id:\([0-9]*\)$/\1/p" | head -1) || true
        [[ -n $node ]] && note "$pid" "$node"
    done
    local again=1
    while (( again )); do
        again=0
        while read -r pid parent; do
            node=${node_of[$parent]:-}
            if [[ -n $node && -z ${node_of[$pid]:-} ]]; then note "$pid" "$node" && again=1; fi
        done < <(ps -e -o pid=,ppid=)
    done
}

note() {
    local when
    when=$(started "$1") || return 1
    node_of[$1]=$2
    echo "$1 $when $2 $(cat "/proc/$1/comm" 2>/dev/null || echo '?')" >> "$pids"
}

# Signal the recorded processes of one node (or of all) that are still the ones recorded.
signal() {
    local name=$1 only=$2 pid when node _
    while read -r pid when node _; do
        if [[ $only == all || $node == "$only" ]] && lives "$pid" "$when"; then kill "-$name" "$pid" 2>/dev/null || true; fi
    done < "$pids"
}

left() {
    local only=$1 pid when node name
    while read -r pid when node name; do
        if [[ $only == all || $node == "$only" ]] && lives "$pid" "$when"; then echo "$pid $node $name"; fi
    done < "$pids"
}

await_end() {
    local only=$1 tenths=$2
    while (( tenths-- > 0 )); do
        [[ -n $(left "$only") ]] || return 0
        sleep 0.1
    done
    return 1
}

port_is_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

cluster_id() { cat "$state/id" 2>/dev/null || die "no cluster in $state; start one with: $0 up N"; }

start_node() {
    local node=$1 port=$((base + 1 + $1 * 6)) where resources='{}'
    if (( node == 0 )); then
        where=(--head "--port=$base" "--temp-dir=$ray_tmp" --include-dashboard=false)
        resources='{"kimi_ray_storage": 1}'
    else
        where=("--address=127.0.0.1:$base")
    fi
    # Worker ports 0: the kernel gives free ones, so that nodes on one machine do not meet.
    if ! KIMI_RAY_CLUSTER=$id:$node RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$token RAY_AUTH_TOKEN_PATH='' \
        RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 RAY_USAGE_STATS_ENABLED=0 \
        "$python" -m ray.scripts.scripts start "${where[@]}" \
        --node-ip-address=127.0.0.1 "--num-cpus=$cpus" --num-gpus=0 "--resources=$resources" \
        "--object-store-memory=$((store_mb * 1024 * 1024))" \
        "--node-manager-port=$port" "--object-manager-port=$((port + 1))" "--runtime-env-agent-port=$((port + 2))" \
        "--dashboard-agent-grpc-port=$((port + 3))" "--dashboard-agent-listen-port=$((port + 4))" \
        "--metrics-export-port=$((port + 5))" --min-worker-port=0 --max-worker-port=0 \
        --disable-usage-stats --log-style=record --log-color=false \
        < /dev/null >> "$state/start.log" 2>&1
    then
        echo "local.sh: node $node did not start; the end of $state/start.log:" >&2
        tail -n 15 "$state/start.log" >&2
        return 1
    fi
    record "$id"
}

up() {
    local count=${1:-} node port
    [[ $count =~ ^[1-9][0-9]?$ ]] || die "usage: $0 up N [--base-port P] [--num-cpus C] [--object-store-mb M]"
    shift
    base=46379 cpus=2 store_mb=100
    while (( $# )); do
        [[ ${2:-} =~ ^[0-9]+$ ]] || die "$1 needs a number"
        case $1 in
            --base-port) base=$2 ;;
            --num-cpus) cpus=$2 ;;
            --object-store-mb) store_mb=$2 ;;
            *) die "unknown option $1" ;;
        esac
        shift 2
    done
    (( base >= 1024 && base + 6 * count < 65536 )) || die "--base-port must leave $((6 * count)) ports below 65536"
    (( store_mb >= 80 )) || die "Ray needs an object store of at least 80 MB"
    "$python" -c 'import ray' 2>/dev/null || die "$python has no ray; install kimi-ray, or set PYTHON"
    for (( port = base; port <= base + 6 * count; port++ )); do
        port_is_free "$port" || die "port $port is in use; choose another --base-port"
    done
    umask 077
    mkdir -p "$state" || die "$state cannot be made; set KIMI_RAY_CLUSTER_DIR"
    if [[ -e $state/id ]]; then
        [[ -z $(left all) ]] || die "a cluster is already up in $state; end it with: $0 down"
        clean
        mkdir -p "$state"
    fi
    id=$("$python" -c 'import secrets; print(secrets.token_hex(8))')
    token=$("$python" -c 'import secrets; print(secrets.token_hex(32))')
    # Ray's sockets lie below its temporary directory, and a socket's path has at most 107 bytes and no space.
    ray_tmp=$state/ray
    [[ ${#ray_tmp} -le 44 && $ray_tmp != *[[:space:]]* ]] || ray_tmp=$(mktemp -d /tmp/kr-XXXXXX)
    mkdir -p "$ray_tmp"
    echo "$ray_tmp" > "$state/ray_tmp"
    : > "$pids"
    : > "$state/start.log"
    echo "$base" > "$state/port"
    echo "$count $cpus $store_mb" > "$state/shape"    # numbers given so far, and what each node gets
    printf 'export RAY_AUTH_MODE=token\nexport RAY_AUTH_TOKEN=%s\nexport RAY_ENABLE_UV_RUN_RUNTIME_ENV=0\n' "$token" > "$state/env"
    echo "$id" > "$state/id"
    trap 'echo "local.sh: undoing" >&2; down >&2' EXIT
    for (( node = 0; node < count; node++ )); do
        start_node "$node" || exit 1
        echo "node $node is up$( (( node )) || echo ' (head, storage)')"
    done
    trap - EXIT
    echo "Before a driver: eval \"\$($0 env)\""
    cat "$state/env"
    echo "--address 127.0.0.1:$base"
}

add() {
    local node port
    id=$(cluster_id)
    base=$(cat "$state/port")
    token=$(sed -n 's/^export RAY_AUTH_TOKEN=//p' "$state/env")
    read -r node cpus store_mb < "$state/shape"
    (( base + 6 * (node + 1) < 65536 )) || die "no ports are left above --base-port $base"
    for (( port = base + 1 + 6 * node; port <= base + 6 * (node + 1); port++ )); do
        port_is_free "$port" || die "port $port is in use"
    done
    # A number is given once: the ports of a node that is gone may still be held.
    echo "$((node + 1)) $cpus $store_mb" > "$state/shape"
    start_node "$node" || exit 1
    echo "node $node is up"
}

clean() {
    local ray_tmp
    ray_tmp=$(cat "$state/ray_tmp" 2>/dev/null || true)
    if [[ -n $ray_tmp && ( $ray_tmp == "$state/ray" || $ray_tmp == /tmp/kr-?????? ) ]]; then rm -rf -- "$ray_tmp"; fi
    rm -f -- "$state"/{id,pids,port,shape,env,ray_tmp,start.log}
    rmdir -- "$state" 2>/dev/null || true
}

down() {
    trap - EXIT
    local id
    if [[ ! -e $state/id ]]; then echo "no cluster in $state"; return 0; fi
    id=$(cluster_id)
    record "$id"
    signal TERM all
    await_end all 15 || true
    record "$id"
    signal KILL all
    await_end all 100 || { left all >&2; die "these processes did not end"; }
    clean
    echo "down"
}

kill_node() {
    local only=${1:-} id
    [[ $only =~ ^[0-9]+$ ]] || die "usage: $0 kill I"
    id=$(cluster_id)
    record "$id"
    [[ -n $(left "$only") ]] || die "node $only does not run"
    signal KILL "$only"
    await_end "$only" 100 || die "node $only did not end"
    echo "node $only is gone"
}

status() {
    local id pid node name
    id=$(cluster_id)
    record "$id"
    echo "--address 127.0.0.1:$(cat "$state/port")"
    left all | sort -k2,2n -k1,1n | while read -r pid node name; do echo "node $node  pid $pid  $name"; done
}

case ${1:-} in
    up) shift; up "$@" ;;
    add) add ;;
    down) down ;;
    env) cluster_id > /dev/null; cat "$state/env" ;;
    status) status ;;
    kill) shift; kill_node "$@" ;;
    *) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
