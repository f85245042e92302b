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
{{- range list "model" "host" "port" "shutdown-timeout" "api-keys-file" -}}
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
{{ merge $own .Values.config | toYaml }}
{{- end -}}
