{{- /* The pod template that every kind of workload shares. `role` is leader or worker in a group, and else empty. */ -}}
{{- define "jaxserve.pod" -}}
{{- $role := .role -}}
{{- with .root -}}
metadata:
  labels:
    {{- include "jaxserve.labels" . | nindent 4 }}
    {{- with .Values.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # other flags make other pods
    checksum/config: {{ include "jaxserve.config" . | sha256sum }}
    {{- with .Values.annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "jaxserve.name" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add .Values.drain.preStopSeconds .Values.drain.shutdownTimeoutSeconds 15 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: jaxserve
      image: {{ include "jaxserve.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        - --config
        - /etc/jaxserve/serve.yaml
        {{- if $role }}
        # LWS gives each container of a group its variables
        - --process-id=$(LWS_WORKER_INDEX)
        - --coordinator={{ eq $role "leader" | ternary "[$(POD_IP)]" "$(LWS_LEADER_ADDRESS)" }}:{{ .Values.leaderWorkerSet.port }}
        {{- end }}
      {{- if ne $role "worker" }}
      ports:
        - name: http
          containerPort: {{ .Values.port }}
      {{- end }}
      {{- if or .Values.env .Values.secrets.huggingFace.name (eq $role "leader") }}
      env:
        {{- if eq $role "leader" }}
        # when it begins to listen its name may not be known yet
        - name: POD_IP
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
        {{- with .Values.secrets.huggingFace }}
        {{- if .name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
        {{- end }}
        {{- end }}
        {{- with .Values.env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- end }}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      lifecycle:
        preStop:
          exec:
            {{- if eq $role "worker" }}
            # it ends by itself when the leader has drained, and is needed until then
            command: [sleep, {{ add .Values.drain.preStopSeconds .Values.drain.shutdownTimeoutSeconds 10 | quote }}]
            {{- else }}
            command: [sleep, {{ .Values.drain.preStopSeconds | quote }}]
            {{- end }}
      {{- if ne $role "worker" }}
      startupProbe:
        httpGet: {path: {{ .Values.probes.readiness.path }}, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add .Values.probes.startupSeconds 4) 5 }}
      {{- range $kind := list "readiness" "liveness" }}
      {{ $kind }}Probe:
        {{- with index $.root.Values.probes $kind }}
        httpGet: {path: {{ .path }}, port: http}
        periodSeconds: {{ .periodSeconds }}
        timeoutSeconds: {{ .timeoutSeconds }}
        failureThreshold: {{ .failureThreshold }}
        {{- end }}
      {{- end }}
      {{- end }}
      volumeMounts:
        - {name: config, mountPath: /etc/jaxserve, readOnly: true}
        - {name: cache, mountPath: /home/jaxserve/.cache}
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.secrets.apiKeys.name }}
        - {name: api-keys, mountPath: /etc/jaxserve-keys, readOnly: true}
        {{- end }}
        {{- if $role }}
        - {name: process-token, mountPath: /etc/jaxserve-process, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: config
      configMap: {name: {{ include "jaxserve.name" . }}}
    - name: cache
      {{- if .Values.cache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim }}}
      {{- else if .Values.cache.persistent }}
      persistentVolumeClaim: {claimName: {{ include "jaxserve.name" . }}-cache}
      {{- else }}
      emptyDir: {sizeLimit: {{ .Values.cache.size }}}
      {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 2Gi}
    {{- with .Values.secrets.apiKeys }}
    {{- if .name }}
    - name: api-keys
      secret:
        secretName: {{ .name }}
        items: [{key: {{ .key }}, path: keys.yaml}]
    {{- end }}
    {{- end }}
    {{- if $role }}
    - name: process-token
      secret:
        secretName: {{ .Values.secrets.processToken.name }}
        items: [{key: {{ .Values.secrets.processToken.key }}, path: token}]
    {{- end }}
    {{- with .Values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}
{{- end -}}
