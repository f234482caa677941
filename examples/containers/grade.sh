# The answer must be the one number that is due. It is compared as text: nothing of the agent's is executed.
due="{\"answer\": $(cat "$SANDBOX_EXEC_GRADING/due")}"
if [ "$(cat "$SANDBOX_EXEC_OUT/result.json")" = "$due" ]; then score=1 passed=true; else score=0 passed=false; fi
echo "{\"score\": $score, \"passed\": $passed}" >"$SANDBOX_EXEC_GRADE"
