// Package pagestyle holds the style sheet that all pages of Stowage share: colours in a
// light and a dark theme, type, the bar on top, cards, panels and tables. A page adds
// its own rules behind it.
package pagestyle

import (
	_ "embed"
	"strings"
)

var (
	//go:embed theme.css
	theme string
	//go:embed base.css
	base string
)

// darkTheme begins the rule of the dark theme in theme.css.
const darkTheme = `:root[data-theme="dark"] {`

// CSS returns the style sheet. A page chooses a theme with the attribute data-theme of
// its root element, "light" or "dark". Without the attribute the system decides.
func CSS() string {
	_, dark, _ := strings.Cut(theme, darkTheme)
	return theme + "@media (prefers-color-scheme: dark) { :root:not([data-theme]) {" + dark + "}\n" + base
}

// Theme returns the part of the style sheet that sets the colours of both themes.
func Theme() string { return theme }
