{{- define "jaxserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "jaxserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* LWS gives the Service of its pods' names the name of the LeaderWorkerSet. */ -}}
{{- define "jaxserve.group" -}}
{{- printf "%s-group" (include "jaxserve.name" . | trunc 40 | trimSuffix "-") -}}
{{- end -}}

{{- /* Not empty where an engine has the devices of several pods. */ -}}
{{- define "jaxserve.isGroup" -}}
{{- if and (eq .Values.workload "LeaderWorkerSet") (gt (int .Values.leaderWorkerSet.size) 1) }}true{{ end -}}
{{- end -}}

{{- /* Of an update: a new pod or group serves before an old one goes, unless there is no room for one more. */ -}}
{{- define "jaxserve.update" -}}
{maxSurge: {{ int .Values.maxSurge }}, maxUnavailable: {{ if gt (int .Values.maxSurge) 0 }}0{{ else }}1{{ end }}}
{{- end -}}

{{- define "jaxserve.labels" -}}
{{ include "jaxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "jaxserve.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- /* What the names of metrics begin with. */ -}}
{{- define "jaxserve.prefix" -}}
{{- index .Values.config "metrics-prefix" | default "jaxserve" -}}
{{- end -}}

{{- /* A file of rules or of a dashboard, for the server's own prefix. */ -}}
{{- define "jaxserve.monitoring" -}}
{{- .root.Files.Get .file | replace "jaxserve:" (printf "%s:" (include "jaxserve.prefix" .root)) -}}
{{- end -}}

{{- /* The file of flags that the server reads. */ -}}
{{- define "jaxserve.config" -}}
{{- range list "model" "host" "port" "shutdown-timeout" "api-keys-file" "num-processes" "process-id" "coordinator" "process-token-file" -}}
{{- if hasKey $.Values.config . }}{{ fail (printf "config.%s: the chart sets it, from a value of its own" .) }}{{ end -}}
{{- end -}}
{{- range $name, $_ := .Values.config -}}
{{- if or (has $name (list "uds" "allowed-hosts")) (hasPrefix "ssl-" $name) -}}
{{- fail (printf "config.%s: the probes ask each pod by its address over plain HTTP; an ingress or a mesh before the pods has it" $name) -}}
{{- end -}}
{{- end -}}
{{- $own := dict "host" "0.0.0.0" "port" (int .Values.port) "shutdown-timeout" (int .Values.drain.shutdownTimeoutSeconds) -}}
{{- if .Values.model }}{{ $_ := set $own "model" .Values.model }}{{ end -}}
{{- if .Values.secrets.apiKeys.name }}{{ $_ := set $own "api-keys-file" "/etc/jaxserve-keys/keys.yaml" }}{{ end -}}
{{- if include "jaxserve.isGroup" . -}}
{{- $size := int .Values.leaderWorkerSet.size -}}
{{- range $name := list "data-parallel-size" "pipeline-parallel-size" -}}
{{- if ne (int (index $.Values.config $name | default 1)) 1 -}}
{{- fail (printf "config.%s: 1 where the %d pods of a group are one engine" $name $size) -}}
{{- end -}}
{{- end -}}
{{- $devices := int (index .Values.config "tensor-parallel-size" | default 1) -}}
{{- if mod $devices $size -}}
{{- fail (printf "config.tensor-parallel-size: %d is no multiple of leaderWorkerSet.size, %d pods that have as many devices each" $devices $size) -}}
{{- end -}}
{{- if eq (int .Values.leaderWorkerSet.port) (int .Values.port) -}}
{{- fail (printf "leaderWorkerSet.port: %d is the port of HTTP" (int .Values.port)) -}}
{{- end -}}
{{- if not .Values.secrets.processToken.name -}}
{{- fail (printf "secrets.processToken.name: empty, but the %d pods of a group know each other by a secret" $size) -}}
{{- end -}}
{{- $_ := set $own "num-processes" $size -}}
{{- $_ := set $own "process-token-file" "/etc/jaxserve-process/token" -}}
{{- end -}}
{{ merge $own .Values.config | toYaml }}
{{- end -}}
